"""Records, faces, errors, files and devices: what every room may use."""
