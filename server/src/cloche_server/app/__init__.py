"""Use cases: one file per verb. The only place where adapters meet."""
