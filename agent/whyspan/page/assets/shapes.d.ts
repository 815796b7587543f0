// Made from agent/whyspan/views/shapes.py by `python -m tests.page.declarations`. Types only: no file of this name is loaded.

/** A request in the list. ``cause`` is empty when it was neither slow nor failed. */
export interface Row {
  id: string;
  trace_id: string;
  service: string;
  method: string;
  route: string;
  model: string;
  tenant: string;
  start_unix_ms: number;
  latency_ms: number;
  ttft_ms: number | null;
  status: number;
  outcome: string;
  slow: boolean;
  failed: boolean;
  cause: string;
  excess_ms: number;
  share: number;
  confidence: number;
  culprit_kind: string;
  culprit: string;
  phase: string;
}

/** A page of the list. ``next`` is the cursor of the page behind it, empty at the end; ``total`` counts all. */
export interface Page {
  rows: Row[];
  total: number;
  next: string;
}

/** What the list can be filtered by, most frequent first; at most `MAX_FACETS` each. */
export interface Facets {
  services: string[];
  causes: string[];
  culprits: string[];
  tenants: string[];
  models: string[];
  routes: string[];
}

/** A piece of a lane, ns since the request's start. An array in JSON: there are up to 50,000. */
export type Piece = [start_ns: number, end_ns: number, state: string, cause: string, detail: string, inferred: boolean];

/** A track of the timeline. ``spans`` are disjoint and in order; ``points`` are of counter lanes, in order. */
export interface Lane {
  key: string;
  kind: string;
  label: string;
  tgid: number;
  tid: number;
  spans: Piece[];
  points: [number, number][];
  unit: string;
}

/** The time of a request that went into a cause. ``usual_ms`` is null when there is no baseline. */
export interface CauseBar {
  cause: string;
  ms: number;
  usual_ms: number | null;
  excess_ms: number;
}

/** Who did it; ``kind`` and ``name`` are empty when nobody is named. */
export interface CulpritView {
  kind: string;
  name: string;
  tgid: number;
  tid: number;
  detail: string;
  trace_id: string;
}

/** Another cause of the same slow request, behind the verdict's. */
export interface OtherCause {
  cause: string;
  excess_ms: number;
  share: number;
  culprit: CulpritView;
}

/** Why the request was slow or failed; ``cause`` and ``sentence`` are empty when it was neither. */
export interface VerdictView {
  sentence: string;
  cause: string;
  excess_ms: number;
  share: number;
  confidence: number;
  culprit: CulpritView;
  evidence: string[];
  fix: string;
  others: OtherCause[];
  code: string;
}

/** A cause set aside, and the check that did it. ``near``: easily mixed up with the one found, or it took time. */
export interface RuledOutView {
  cause: string;
  check: string;
  near: boolean;
}

/** The process that served the request, as known then. */
export interface ProcessView {
  tgid: number;
  comm: string;
  exe: string;
  service: string;
  cgroup: string;
  cpus_allowed: number;
  cpu_count: number;
  vpid: number;
  container_id: string;
  pod_uid: string;
}

/** What else is known of the request. Sizes in bytes. */
export interface RequestFacts {
  request_id: string;
  trace_id_source: string;
  ended_by: string;
  slow_reason: string;
  head: string;
  chunks: number;
  request_bytes: number;
  response_bytes: number;
  client_port: number;
  server_port: number;
  agent: string;
  attempt: number;
  client_wait_ns: number;
}

/** Where to look further. ``kind``: trace, request (``href`` is the store's id), runbook (a file of the docs). */
export interface Link {
  kind: string;
  label: string;
  href: string;
}

/** A total with its name. */
export interface Named {
  name: string;
  value: number;
}

/** A frame of a stack. ``kind``: python, native, kernel, other (it stands for frames that are not known). */
export interface FrameView {
  kind: string;
  name: string;
  place: string;
}

/** A function in a tree of stacks, called by its ``parent``. ``kind`` as of `FrameView`, or thread: the outermost. */
export interface CodeNode {
  parent: number;
  depth: number;
  start: number;
  samples: number;
  own: number;
  kind: string;
  name: string;
  place: string;
  lines: [number, number][];
}

/** The stacks of a cause as one tree: a node is behind its parent, siblings by samples; of depth 0 are threads. */
export interface CodeTree {
  cause: string;
  blocked: boolean;
  samples: number;
  nodes: CodeNode[];
  top: number;
  sentence: string;
  work: Named[];
}

/** Threads that were in the same place in the same state. ``frames``: the innermost first. */
export interface ThreadGroupView {
  state: string;
  syscall: string;
  for_ms: number;
  count: number;
  threads: string[];
  stalled: boolean;
  frames: FrameView[];
}

/** All threads of a process at a moment, ns since the request's start; those that stalled come first. */
export interface SnapshotView {
  at_ns: number;
  tgid: number;
  process: string;
  groups: ThreadGroupView[];
  left_out: number;
}

/** Which code the request's time went to. The first tree is the verdict's, if it has one. */
export interface CodeView {
  trees: CodeTree[];
  left_out: number;
  snapshots: SnapshotView[];
  sampled: boolean | null;
}

/** One request. Lanes: phases, threads in the order in which the path visits them, steps, gpu, counters. */
export interface RequestView {
  row: Row;
  request: RequestFacts;
  wall_ns: number;
  accounted_ns: number;
  lost_events: number;
  first_ns: number | null;
  lanes: Lane[];
  path: [number, number][];
  causes: CauseBar[];
  baseline_count: number;
  verdict: VerdictView;
  ruled_out: RuledOutView[];
  process: ProcessView | null;
  engine: Record<string, any> | null;
  code: CodeView;
  links: Link[];
}

/** A bin of the latency histogram. ``upper_ms`` is null in the last one: it has no bound. */
export interface Bin {
  lower_ms: number;
  upper_ms: number | null;
  requests: number;
  slow_by_cause: Record<string, number>;
}

/** The distribution of latency, over time, with its slow part by cause. Steps without requests have null quantiles. */
export interface TailView {
  services: string[];
  service: string;
  step_ms: number;
  times_unix_ms: number[];
  quantiles: Record<string, (number | null)[]>;
  ttft_quantiles: Record<string, (number | null)[]>;
  counts: number[];
  by_cause: Record<string, number[]>;
  by_cause_requests: Record<string, number[]>;
  histogram: Bin[];
  requests: number;
  slow: number;
  failed: number;
  partial: boolean;
}

/** A line of a chart of the host. ``group``: pressure, throttled, memory, cpu, load, probes, losses. */
export interface Series {
  key: string;
  group: string;
  label: string;
  unit: string;
  values: (number | null)[];
}

/** A probe: its state, and what it costs now. */
export interface ProbeCost {
  name: string;
  title: string;
  state: string;
  reason: string;
  hits_per_s: number;
  ns_per_hit: number;
  core_ratio: number;
  events: number;
  lost: number;
}

/** What a process of the agent uses. */
export interface AgentUse {
  name: string;
  tgid: number;
  core_ratio: number | null;
  rss_bytes: number;
  uptime_s: number;
}

/** Where findings go, and whether they arrive. ``state`` is empty when they do. */
export interface SinkState {
  name: string;
  state: string;
  details: Record<string, any>;
}

/** A service that is watched, by how many processes, and how many CPUs its quota gives it. */
export interface WatchedService {
  service: string;
  processes: number;
  cpu_limit: number | null;
}

/** The host: pressure, quotas, what the agent itself costs and loses. */
export interface HostView {
  running: boolean;
  collector_unix_ms: number | null;
  step_ms: number;
  times_unix_ms: number[];
  series: Series[];
  probes: ProbeCost[];
  agent: AgentUse[];
  losses: Named[];
  sinks: SinkState[];
  services: WatchedService[];
  gpus: Record<string, any>[];
  gpu_state: string;
}
