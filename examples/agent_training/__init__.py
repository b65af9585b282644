"""Training of a policy that calls a tool, through agent sessions: `make demo-agent`."""
