"""What other systems need to run beside this one: requirements, and small programs for their own environments."""
