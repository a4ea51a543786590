"""The errors of DisaggKD, typed by whose fault they are.

Local = our bug, Remote = the peer's, Transport = the wire's, Config = the user's. Every message says what was asked,
what was found and what is allowed; callers catch types and never match text.
"""

from __future__ import annotations


class DisaggKDError(Exception):
    """Base of every error that DisaggKD raises on purpose. `exit_code` is what a command ends with."""

    exit_code = 1


class ConfigError(DisaggKDError):
    """The user asked for something that can't be done: a flag, a file, a pair of models that don't fit."""

    exit_code = 2


class LocalProtocolError(DisaggKDError):
    """Our own code broke the contract: a call that is illegal in the present state. Nothing was changed."""


class RemoteProtocolError(DisaggKDError):
    """The peer broke the protocol: a malformed, oversized or unexpected message."""


class TransportError(DisaggKDError):
    """The wire failed."""


class DeadlineExceeded(TransportError):
    """What was waited for did not happen in time; the operation is still pending."""


class TransportClosed(TransportError):
    """This side closed the channel; nothing can be sent or received on it any more."""


class PeerLost(TransportError):
    """The other side of the channel is gone: its process ended or its connection broke."""


class TeacherLost(DisaggKDError):
    """No replica was left within the time the user allows. Names the replicas and the last error of each."""

    exit_code = 3
