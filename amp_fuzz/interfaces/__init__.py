"""What users touch: the command line, the pytest plugin, `amp_fuzz.check`."""
