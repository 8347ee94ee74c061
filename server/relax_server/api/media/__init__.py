"""Media of strangers on their way in: decoded in processes that may die, before anything else of the service opens them."""
