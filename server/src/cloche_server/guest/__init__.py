"""The host side of the guest link: everything that speaks to the agent inside a sandbox.

What comes from a guest is untrusted. Each layer bounds what it keeps and checks what it hands on:
`sync` finds the start of a conversation, `h2link` carries calls over HTTP/2, `frames` decodes the
output of commands, `client` offers the calls of docs/agent-protocol.md as methods.
"""
