"""Records, faces, errors, files and devices, which every room may use."""
