"""`llamarl.start_engines`: the verbs of a run under a loop of the caller's own."""
