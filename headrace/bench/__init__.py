"""The load generator: fixed workloads, run in process or through a gateway."""
