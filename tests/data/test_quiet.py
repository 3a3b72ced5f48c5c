"""What image libraries say is dropped while images are read, in every thread, and heard again afterwards."""

import logging
import threading
import warnings

import pytest

from fl_dpgan.data.quiet import quiet


def speak():
    warnings.warn("said", stacklevel=1)
    logging.getLogger("pydicom").error("said")
    logging.getLogger("PIL.PngImagePlugin").error("said")


def test_warnings_and_logs_are_dropped_inside_and_heard_outside(caplog):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with quiet(), quiet():
            speak()
        assert not heard and not caplog.records
        speak()
    assert len(heard) == 1 and len(caplog.records) == 2


def test_an_error_leaves_everything_as_it_was():
    before = (list(warnings.filters), logging.getLogger("pydicom").level, logging.getLogger("PIL").level)
    with pytest.raises(KeyError), quiet():
        raise KeyError
    assert before == (list(warnings.filters), logging.getLogger("pydicom").level, logging.getLogger("PIL").level)


def test_the_first_of_two_threads_to_leave_does_not_let_the_other_be_heard(caplog):
    first_left, second_in = threading.Event(), threading.Event()

    def second():
        with quiet():
            second_in.set()
            first_left.wait(10)
            speak()

    before = list(warnings.filters)
    thread = threading.Thread(target=second)
    with quiet():
        thread.start()
        assert second_in.wait(10)
    first_left.set()
    thread.join()
    assert not caplog.records and list(warnings.filters) == before
