"""What a recipe will need and do, found out on a CPU before any GPU is rented: memory, publish, step
time. Invariant: the controller, gate, packing and publish plan that a forecast uses are the run's."""
