"""Whether the right bits are in the right places, and which version a tensor holds."""
