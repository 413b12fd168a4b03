"""Where rollouts lie, and how processes of one host and of others read and write them."""
