"""The devices that torch computes on; no other package names those of one vendor."""
