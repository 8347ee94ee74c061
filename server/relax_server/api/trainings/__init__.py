"""Training runs on the service's machines."""
