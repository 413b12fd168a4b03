"""DDMA: layouts, plans, transports, fingerprints and the two-phase publish."""
