"""Pure decisions about where replicas go, and which of them go."""
