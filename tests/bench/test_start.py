from __future__ import annotations

from bench.server.start import BASE, read_stages, slower


def test_the_banner_s_line_is_read() -> None:
    line = "  started in 1.9 s: command 0.20, header and plan 0.10, KV cache 0.02, server 1.58\n"
    found = read_stages(line)
    assert found == {"command": 0.2, "header and plan": 0.1, "KV cache": 0.02, "server": 1.58}


def test_a_stage_that_takes_twice_as_long_is_named() -> None:
    assert slower(dict(BASE)) == []
    base = BASE["weights"]
    (line,) = slower({**BASE, "weights": 2.2 * base})
    assert line == f"weights takes {2.2 * base:.2f} times the yardstick; it was {base:.2f}"
