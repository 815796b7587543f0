"""Names of functions as they are shown: demangled C++ and Rust, copies of functions, and names that mean harm."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.code.functions import shorten


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("memcpy", "memcpy"),
        ("foo.isra.0.constprop.3", "foo"),
        ("runtime.goexit.abi0", "runtime.goexit.abi0"),
        ("f(int) [clone .cold]", "f"),
        ("void a::f<int>(char*, int (*)(long)) const", "a::f<int>"),
        ("std::vector<int, std::allocator<int> > a::g<b>(int)", "a::g<b>"),
        ("a::operator()(int) const", "a::operator()"),
        ("std::ostream& operator<< <char>(std::ostream&, char)", "operator<<<char>"),
        ("operator new(unsigned long)", "operator new"),
        ("A::operator unsigned int() const", "A::operator unsigned int"),
        ("(anonymous namespace)::x(int)", "{anonymous}::x"),
        ("foo(int)::{lambda(int)#1}::operator()(int) const", "foo::{lambda#1}::operator()"),
        ("core::fmt::Formatter::pad::h0123456789abcdef", "core::fmt::Formatter::pad"),
        (
            "_$LT$alloc..vec..Vec$LT$T$GT$$u20$as$u20$core..ops$GT$::drop::h0123456789abcdef",
            "<alloc::vec::Vec<T> as core::ops>::drop",
        ),
        ("void at::kernel<" + "x, " * 60 + "a<b> >::run(int)", "at::kernel<…>::run"),
        ("main::{{closure}}", "main::{{closure}}"),
        ("LazyCompile:~foo /srv/a.js:1:2", "LazyCompile:~foo /srv/a.js:1:2"),
    ],
)
def test_names_as_people_read_them(name: str, shown: str) -> None:
    assert shorten(name) == shown


@given(st.text(alphabet="<>() ab:&.[]$h0operator,", max_size=300))
def test_whatever_the_name_is_there_is_an_answer(name: str) -> None:
    out = shorten(name)
    assert len(out) <= 2 * len(name) + 3
    assert bool(out) or not name.strip(" .&") or "(" in name or "<" in name or "[clone" in name


def test_a_name_that_means_harm_takes_no_time() -> None:
    before_s = time.process_time()
    for piece in ("(", "<", "operator", ".isra.0", " [clone ", "$LT$", " const", "a "):
        shorten(piece * 100_000)
    assert time.process_time() - before_s < 5
