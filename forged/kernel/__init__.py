"""The daemon's core: how a message becomes a durable decision, and how handlers get the facts of it.

The flow, in reading order:

1. `net.transport` receives bytes; `net.protocol.frames` cuts frames, `net.protocol.messages` decodes a message.
2. `net.session.Session` turns a request message into a `Request` and a `Call` (principal, request number, deadline).
3. `bus.dispatcher.RequestDispatcher` authorises it, returns the remembered reply of a repeated request, checks the
   fence, runs the wrappers and the one handler.
4. The handler changes its state in memory and returns a `messages.Decision`: reply, facts, writes.
5. `ledger.Ledger` numbers the decision and commits several decisions in one transaction through `store.port.Store`.
6. When the batch is durable, its facts enter `journal.Journal`, the bus puts them into each `bus.mailbox.Mailbox`,
   and `pending.Pending` releases the reply to the session.
7. Followers (`bus.follower`) and subscribed clients (`net.protocol.streams`) read facts from the journal at their own
   pace.
"""
