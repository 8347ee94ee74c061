"""The rollout service: environments and recorded episodes over HTTP."""
