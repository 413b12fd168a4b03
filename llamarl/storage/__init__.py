"""The storage of rollouts, which processes of one host and of others read and write."""
