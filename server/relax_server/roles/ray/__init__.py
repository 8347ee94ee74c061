"""The `ray` runtime: the roles of a run as Ray actors, on this machine or on several."""
