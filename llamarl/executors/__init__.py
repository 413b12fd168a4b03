"""What runs in each process: plain classes that know neither the cluster nor the loop."""
