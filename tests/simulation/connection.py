"""A control connection between one life of a student and one of a replica, and the notice of the data channel's end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ring.core import codec
from ring.core.messages import Message
from tests.simulation.data_plane import Sender
from tests.simulation.network import Pipe

if TYPE_CHECKING:
    from tests.simulation.replica_life import ReplicaLife
    from tests.simulation.student_life import Session, StudentLife


class Connection:
    """`name`: how the replica knows the student of this session. `sender`: the replica's end of the data channel, which
    the student's OFFER describes."""

    def __init__(
        self,
        name: str,
        *,
        student: StudentLife,
        session: Session,
        replica: ReplicaLife,
        to_replica: Pipe,
        to_student: Pipe,
        encodes: bool,
    ) -> None:
        """encodes: whether messages go through the wire codec."""
        self.name = name
        self.student = student
        self.replica = replica
        self.sender: Sender | None = None
        self._session = session
        self._to_replica = to_replica
        self._to_student = to_student
        self._encodes = encodes

    def tell_replica(self, message: Message) -> None:
        message = self._through_the_codec(message)
        self._to_replica.send(lambda: self.replica.hear(self, message))

    def tell_student(self, message: Message) -> None:
        message = self._through_the_codec(message)
        self._to_student.send(lambda: self.student.hear(self._session, message))

    def student_closes(self) -> None:
        self._to_replica.end(lambda: self.replica.connection_ended(self))

    def replica_closes(self) -> None:
        self._to_student.end(lambda: self.student.connection_ended(self._session))

    def _through_the_codec(self, message: Message) -> Message:
        return codec.decode(codec.encode(message)) if self._encodes else message
