"""Measurements. Each file writes its result, with date, hardware, versions and command, to benchmarks/results/."""
