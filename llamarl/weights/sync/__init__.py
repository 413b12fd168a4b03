"""The two-phase publish: prepare, write, verify, commit or abort."""
