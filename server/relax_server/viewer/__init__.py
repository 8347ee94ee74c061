"""The viewer: a read-only HTTP API over run folders, journals and the service, and the built page that shows it."""
