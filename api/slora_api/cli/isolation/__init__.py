"""The probes of `slora audit isolation`. Each probe tries to see or use the data of another tenant."""
