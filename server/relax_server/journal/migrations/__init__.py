"""Alembic's environment and revisions; `relax_server.journal.migrate` runs them."""
