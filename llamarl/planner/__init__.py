"""What a recipe will need and do, found out on a CPU before any GPU is rented: memory, publish,
step time. Invariant: a forecast uses the run's own controller, gate, packing and publish plan."""
