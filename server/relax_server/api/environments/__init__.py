"""Environments that came from outside: registered ones in workers of their own, hosted ones in their owner's process."""
