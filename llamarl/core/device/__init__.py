"""The devices that torch computes on, and the only code that names one vendor's."""
