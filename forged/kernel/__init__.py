"""How decisions become history: messages, the bus, the ledger, the journal and the store."""
