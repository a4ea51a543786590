"""Everything in the transport contract that some backend can't do: the only tests of it that may be skipped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gap:
    """`test`: name of the conformance test, which begins with its clause. `removed_by`: what would close the gap."""

    test: str
    backend: str
    reason: str
    removed_by: str


_NO_OTHER_PROCESS = "teacher and student are one process: neither can be killed or stopped alone"
_NEVER = "nothing: it is what the backend is for"

GAPS = (
    Gap(
        test="test_t2_opening_a_sender_whose_student_does_not_answer_raises_deadline_exceeded",
        backend="local",
        reason="opening takes a look into a table of this process and waits for nobody",
        removed_by=_NEVER,
    ),
    *(
        Gap(test=test, backend="local", reason=_NO_OTHER_PROCESS, removed_by=_NEVER)
        for test in (
            "test_t4_killing_the_teacher_wakes_the_student_with_peer_lost",
            "test_t4_killing_the_student_wakes_the_teacher_with_peer_lost",
            "test_t4_a_student_that_dies_unnoticed_costs_the_next_put_a_lost_peer_and_nothing_else",
            "test_t6_what_a_dead_student_did_not_take_goes_to_the_next",
            "test_t7_killing_the_teacher_leaks_nothing_in_the_student",
            "test_t7_killing_the_student_leaks_nothing_in_the_teacher",
            "test_t9_a_write_that_wakes_up_after_its_fence_reaches_no_live_slot",
            "test_t9_a_stopped_teacher_is_fenced_by_its_death_even_after_close",
        )
    ),
)


def find(test: str, backend: str) -> Gap | None:
    for gap in GAPS:
        if (gap.test, gap.backend) == (test, backend):
            return gap
    return None
