"""Alembic runs this file: the revisions go through the connection, and inside the transaction, of whoever opens the journal."""

from alembic import context

from relax_server.journal.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
