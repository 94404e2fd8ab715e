"""The probes of `slora audit isolation`. Each probe tries to see or to use what belongs to another tenant."""
