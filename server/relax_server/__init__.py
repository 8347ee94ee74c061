"""The hosted half of Relax Gym: rollout service, engines, journal, bus, training and the roles that run them."""
