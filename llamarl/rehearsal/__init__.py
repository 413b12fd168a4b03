"""The rehearsal of a recipe's episodes on a CPU, without its model: a policy that needs no
weights of it plays them, with faults, and a report says what would go wrong in a run."""
