"""The end of a log, however long the log is."""

from relax_server.log_tail import BYTES, log_tail


def test_the_last_lines_are_shown_and_no_more_is_read(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing: who reads it all fails
        file.seek(0, 2)
        file.write(b"".join(b"line %d \xff\n" % number for number in range(100)))
    assert log_tail(log, 2) == "line 98 \ufffd\nline 99 \ufffd"
    assert len(log_tail(log, 10**6)) <= BYTES


def test_a_short_log_is_shown_whole_and_a_missing_one_is_empty(tmp_path):
    (tmp_path / "log").write_text("one\ntwo")
    assert log_tail(tmp_path / "log") == "one\ntwo"
    assert log_tail(tmp_path / "none") == ""
