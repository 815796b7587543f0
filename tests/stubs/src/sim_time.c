/* libcuda: this process's place on the device, and time there: sharing, copy engines, clocks, accounts. */
#include "sim.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static struct proc *proc_;

/* -- this process's place -- */

static bool gone(u32 pid)
{
	return kill((pid_t)pid, 0) && errno == ESRCH;
}

static void free_place(struct proc *p)
{
	u8 mark = (u8)(p - region->procs + 1);

	for (u32 d = 0; d < region->devices; d++) {
		struct gpu *gpu = &region->gpus[d];

		if (!p->granules[d])
			continue;
		for (u32 g = 0; g < MAX_GRANULES; g++)
			if (gpu->owner[g] == mark)
				gpu->owner[g] = 0, gpu->used_granules--;
	}
	memset(p, 0, sizeof(*p));
}

struct proc *this_process(void)
{
	struct proc *p;

	if (proc_)
		return proc_;
	lock_word(&region->lock);
	for (u32 i = 0; i < MAX_PROCESSES; i++)
		if (region->procs[i].pid && gone(region->procs[i].pid))
			free_place(&region->procs[i]);
	for (p = region->procs; p < region->procs + MAX_PROCESSES - 1 && p->pid; p++)
		;
	memset(p, 0, sizeof(*p));
	p->pid = (u32)getpid();
	proc_ = p;
	unlock_word(&region->lock);
	return p;
}

__attribute__((destructor)) void leave_device(void)
{
	if (!proc_ || proc_->pid != (u32)getpid())
		return;
	lock_word(&region->lock);
	free_place(proc_);
	proc_ = NULL;
	unlock_word(&region->lock);
}

struct gpu *gpu_of(const struct context *ctx)
{
	return &region->gpus[ctx->device];
}

/* -- time on the device -- */

static f64 share_of(const struct proc *p, int d, u64 at)
{
	u64 window = at / BUCKET_NS;

	if (p->window[d] == window)
		return (f64)p->last_busy_ns[d] / BUCKET_NS;
	return p->window[d] + 1 == window ? (f64)p->window_busy_ns[d] / BUCKET_NS : 0.0;
}

/*
 * When work that starts at `at` and takes `ns` alone ends, if other processes have the device in turn: as long as
 * another has work, both go at half speed; then by how busy it was of late.
 */
u64 shared_end(int d, u64 at, f64 ns)
{
	for (int round = 0; round < MAX_PROCESSES && ns > 0; round++) {
		u64 next = ULLONG_MAX;
		f64 slower = 1.0;

		for (u32 i = 0; i < MAX_PROCESSES; i++) {
			const struct proc *p = &region->procs[i];

			if (!p->pid || p == proc_)
				continue;
			if (p->spinning[d]) {
				slower += 1.0;
			} else if (p->busy_until_ns[d] > at) {
				slower += 1.0;
				next = sooner(next, p->busy_until_ns[d]);
			} else {
				slower += share_of(p, d, at);
			}
		}
		if (next == ULLONG_MAX || ns * slower <= (f64)(next - at))
			return at + (u64)(ns * slower);
		ns -= (f64)(next - at) / slower;
		at = next;
	}
	return at;
}

static u32 bucket(struct gpu *gpu, u64 at)
{
	u64 number = at / BUCKET_NS;
	u32 i = (u32)(number % BUCKETS);

	if (gpu->bucket[i] != number) {
		gpu->bucket[i] = number;
		gpu->bucket_busy_ns[i] = gpu->bucket_h2d_bytes[i] = gpu->bucket_d2h_bytes[i] = 0;
	}
	return i;
}

/* The device is busy from `begin` to `end`, for this process. */
void account(int d, u64 begin, u64 end)
{
	struct gpu *gpu = &region->gpus[d];
	struct proc *p = proc_;
	u64 from, to, window, bound;

	lock_word(&region->lock);
	from = later(begin, p->covered_ns[d]);
	if (end > from) {
		p->busy_ns[d] += end - from;
		p->covered_ns[d] = end;
		window = from / BUCKET_NS;
		if (p->window[d] != window) {
			p->last_busy_ns[d] = p->window[d] + 1 == window ? p->window_busy_ns[d] : 0;
			p->window[d] = window;
			p->window_busy_ns[d] = 0;
		}
		p->window_busy_ns[d] = sooner(p->window_busy_ns[d] + end - from, BUCKET_NS);
	}
	p->busy_until_ns[d] = later(p->busy_until_ns[d], end);
	if (begin > gpu->covered_ns)
		gpu->stretch_ns = begin;
	from = later(begin, gpu->covered_ns);
	if (end > from) {
		gpu->busy_ns += end - from;
		gpu->covered_ns = end;
		bound = sooner(end, from + (BUCKETS - 56) * BUCKET_NS);
		for (; from < bound; from = to) {
			to = sooner(bound, (from / BUCKET_NS + 1) * BUCKET_NS);
			gpu->bucket_busy_ns[bucket(gpu, from)] += to - from;
		}
	}
	unlock_word(&region->lock);
}

/* A copy has its direction's engine for itself. */
u64 engine_turn(struct gpu *gpu, enum copy_engine e, u64 start, u64 ns, u64 bytes)
{
	u32 i;

	lock_word(&region->lock);
	start = later(start, gpu->engine_end_ns[e - 1]);
	gpu->engine_end_ns[e - 1] = start + ns;
	gpu->copied_bytes[e - 1] += bytes;
	i = bucket(gpu, start);
	if (e == TO_DEVICE)
		gpu->bucket_h2d_bytes[i] += bytes;
	else
		gpu->bucket_d2h_bytes[i] += bytes;
	unlock_word(&region->lock);
	return start + ns;
}

static f64 generation_speed(u32 generation)
{
	return generation ? (f64)(1U << (generation - 1)) : 1.0;
}

/* What `bytes` take over the link, with its width and generation as they are. */
u64 link_ns(const struct context *ctx, u64 bytes, u64 bps)
{
	const struct gpu *gpu = gpu_of(ctx);
	f64 part = gpu->link_factor;

	if (gpu->pcie_width_max)
		part *= (f64)gpu->pcie_width / gpu->pcie_width_max;
	part *= generation_speed(gpu->pcie_gen) / generation_speed(gpu->pcie_gen_max);
	return part > 0 && bps ? (u64)((f64)bytes * 1e9 / ((f64)bps * part)) : 0;
}

u64 kernel_ns(struct function *f, u64 blocks)
{
	const struct control *c = &region->control;

	if (unlikely(f->generation != c->generation + 1)) {
		f->ns = c->kernel_ns;
		f->ns_per_block = 0;
		for (u32 i = 0; i < MAX_RULES && c->rules[i].pattern[0]; i++) {
			const char *want = c->rules[i].pattern;
			bool fits = *want == '^' ? !strncmp(f->name, want + 1, strlen(want + 1)) : !!strstr(f->name, want);

			if (!fits)
				continue;
			f->ns = c->rules[i].ns;
			f->ns_per_block = c->rules[i].ns_per_block;
			break;
		}
		f->generation = c->generation + 1;
	}
	return f->ns + f->ns_per_block * blocks;
}
