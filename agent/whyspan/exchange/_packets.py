"""Packets of a Perfetto trace: one sequence, strings interned, times on CLOCK_MONOTONIC."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from whyspan.text import clean

_SEQUENCE: Final = 1
_CHUNK: Final = 2000  # packets kept in memory
_TEXT: Final = 300
_NAME: Final = 120
_MAX_NS: Final = (1 << 63) - 1
_NEEDS_STATE: Final = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
_REALTIME: Final = pb.BUILTIN_CLOCK_REALTIME
_MONOTONIC: Final = pb.BUILTIN_CLOCK_MONOTONIC


class Packets:
    """Makes packets, and serialises them by the thousand. Texts are made safe and short here."""

    def __init__(self, start_ns: int, start_unix_ns: int) -> None:
        """Times given later are ns since *start_ns*, which is *start_unix_ns* by the wall clock."""
        self._start_ns = start_ns
        self._trace = pb.Trace()
        self._interned: dict[tuple[str, str], int] = {}
        first = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        first.clock_snapshot.primary_trace_clock = _MONOTONIC
        first.clock_snapshot.clocks.add(clock_id=_MONOTONIC, timestamp=_clamp(start_ns))
        first.clock_snapshot.clocks.add(clock_id=_REALTIME, timestamp=_clamp(start_unix_ns))
        second = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        second.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        second.trace_packet_defaults.timestamp_clock_id = _MONOTONIC

    def take(self, packets: Iterable[Any]) -> Iterator[bytes]:
        """Let packets be made; yield what is to be written when there are many."""
        for _ in packets:
            pass
        if len(self._trace.packet) >= _CHUNK:
            yield self.rest()

    def rest(self) -> bytes:
        """Return what was not yielded yet."""
        data: bytes = self._trace.SerializeToString()
        self._trace = pb.Trace()
        return data

    def track(self, uuid: int, name: str, **fields: Any) -> Any:
        """Return a packet that describes a track; the caller adds what kind it is."""
        packet = self._packet()
        packet.track_descriptor.uuid = uuid
        if name:
            packet.track_descriptor.name = name
        for key, value in fields.items():
            setattr(packet.track_descriptor, key, value)
        return packet

    def begin(
        self,
        track: int,
        at_ns: int,
        category: str,
        name: str,
        facts: Mapping[str, str | int | float | bool],
        *,
        flow_ids: Iterable[int] = (),
        terminating_flow_ids: Iterable[int] = (),
    ) -> Any:
        """Return the begin of a slice. Facts that are empty texts are left out."""
        packet = self._event(track, at_ns, pb.TrackEvent.TYPE_SLICE_BEGIN, category, name)
        event = packet.track_event
        for key, value in facts.items():
            if value != "":
                self._annotate(packet, event.debug_annotations.add(), key, value)
        event.flow_ids.extend(flow_ids)
        event.terminating_flow_ids.extend(terminating_flow_ids)
        return packet

    def end(self, track: int, at_ns: int) -> Any:
        """Return the end of the slice that began last on a track."""
        return self._event(track, at_ns, pb.TrackEvent.TYPE_SLICE_END)

    def instant(self, track: int, at_ns: int, category: str, name: str) -> Any:
        """Return a moment on a track."""
        return self._event(track, at_ns, pb.TrackEvent.TYPE_INSTANT, category, name)

    def counter(self, track: int, at_ns: int, value: float) -> Any:
        """Return a counter's value from a moment on."""
        packet = self._event(track, at_ns, pb.TrackEvent.TYPE_COUNTER)
        packet.track_event.double_counter_value = value
        return packet

    def _packet(self) -> Any:
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = _NEEDS_STATE
        packet.timestamp = _clamp(self._start_ns)
        return packet

    def _event(self, track: int, at_ns: int, kind: int, category: str = "", name: str = "") -> Any:
        packet = self._packet()
        packet.timestamp = _clamp(self._start_ns + at_ns)
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        if category:
            packet.track_event.category_iids.append(self._intern(packet, "event_categories", category))
        if name:
            packet.track_event.name_iid = self._intern(packet, "event_names", name)
        return packet

    def _annotate(self, packet: Any, note: Any, key: str, value: str | int | float | bool) -> None:
        note.name_iid = self._intern(packet, "debug_annotation_names", key)
        if isinstance(value, str):
            note.string_value_iid = self._intern(packet, "debug_annotation_string_values", value)
        elif isinstance(value, bool):
            note.bool_value = value
        elif isinstance(value, int):
            note.int_value = max(-_MAX_NS, min(value, _MAX_NS))
        else:
            note.double_value = value

    def _intern(self, packet: Any, kind: str, text: str) -> int:
        """Return the number of a text, told in *packet* when it is new. A sequence keeps them from then on."""
        number = self._interned.get((kind, text))
        if number is not None:
            return number
        number = self._interned[kind, text] = len(self._interned) + 1
        entry = getattr(packet.interned_data, kind).add(iid=number)
        if kind == "debug_annotation_string_values":
            entry.str = clean(text, _TEXT).encode()
        else:
            entry.name = clean(text, _NAME)
        return number


def _clamp(ns: int) -> int:
    return max(0, min(ns, _MAX_NS))
