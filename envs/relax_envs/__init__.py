"""The environments that ship with Relax Gym; importing this package registers them."""
