/* See stub.h. Compiled into each library: each maps the file itself. */
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

struct region *region;
__thread struct running here;
static struct call *ring;
static __thread u32 tid_;
static __thread int timer_ = -1;
static u32 tgid_;

static void after_fork(void)
{
	tid_ = 0;
	tgid_ = (u32)getpid();
	timer_ = -1;
}

bool stub_attach(void)
{
	static u32 word;
	const char *path = getenv("WHYSPAN_STUB_DEVICE");
	struct stat st;
	void *at;
	int fd;

	if (region || !path)
		return region != NULL;
	lock_word(&word);
	fd = region ? -1 : open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0 && !fstat(fd, &st) && (size_t)st.st_size > sizeof(struct region)) {
		at = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (at != MAP_FAILED && ((struct region *)at)->magic == REGION_MAGIC) {
			ring = (struct call *)((char *)at + sizeof(struct region));
			tgid_ = (u32)getpid();
			pthread_atfork(NULL, NULL, after_fork);
			__atomic_store_n(&region, at, __ATOMIC_RELEASE);
		}
	}
	if (fd >= 0)
		close(fd);
	unlock_word(&word);
	return region != NULL;
}

u32 stub_tid(void)
{
	if (unlikely(!tid_))
		tid_ = (u32)syscall(SYS_gettid);
	return tid_;
}

u64 now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (u64)t.tv_sec * 1000000000ULL + (u64)t.tv_nsec;
}

void burn_until(u64 end_ns)
{
	while (now_ns() < end_ns)
		cpu_relax();
}

void burn_ns(u64 ns)
{
	if (ns)
		burn_until(now_ns() + ns);
}

void count(u64 *counter, u64 by)
{
	__atomic_fetch_add(counter, by, __ATOMIC_RELAXED);
}

/* -- accounts -- */

static u32 register_function(const char *name)
{
	u32 i;

	lock_word(&region->lock);
	for (i = 1; i <= region->functions; i++)
		if (!strcmp(region->funcs[i].name, name))
			goto out;
	if (i < MAX_FUNCTIONS) {
		strncpy(region->funcs[i].name, name, sizeof(region->funcs[i].name) - 1);
		region->functions = i;
	} else {
		i = 0; /* the nameless one; Python refuses a region where it was called */
	}
out:
	unlock_word(&region->lock);
	return i;
}

static i32 forced_failure(const char *name)
{
	struct control *c = &region->control;

	for (u64 i = 0; i < c->fails_set && i < MAX_FAILS; i++) {
		struct fail *f = &c->fails[i];

		if (strcmp(f->function, name))
			continue;
		if (f->left < 0)
			return f->code;
		if (f->left > 0 && __atomic_fetch_sub(&f->left, 1, __ATOMIC_RELAXED) > 0)
			return f->code;
	}
	return 0;
}

void call_begin(u32 *id, const char *name)
{
	here.begin_ns = now_ns();
	here.wait_ns = here.bytes = here.stream = 0;
	here.forced = 0;
	here.function = 0;
	if (!region && !stub_attach())
		return;
	if (unlikely(!*id))
		*id = register_function(name);
	here.function = *id;
	if (unlikely(region->control.fails_set))
		here.forced = forced_failure(name);
}

i32 call_end(i32 result, i32 not_ready)
{
	struct func *f;
	struct call *c;
	u64 seq, end;

	if (!region)
		return result;
	f = &region->funcs[here.function];
	seq = __atomic_fetch_add(&region->ring_next, 1, __ATOMIC_RELAXED);
	c = &ring[seq & (region->ring_size - 1)];
	c->bytes = here.bytes;
	c->stream = here.stream;
	c->tid = stub_tid();
	c->tgid = tgid_;
	c->result = result;
	c->function = (u16)here.function;
	c->device = here.device;
	c->begin_ns = here.begin_ns;
	count(&f->calls, 1);
	if (result && result != not_ready)
		count(&f->errors, 1);
	if (here.wait_ns)
		count(&f->wait_ns, here.wait_ns);
	end = now_ns();
	c->end_ns = end;
	count(&f->time_ns, end - here.begin_ns);
	__atomic_store_n(&c->seq, seq + 1, __ATOMIC_RELEASE);
	return result;
}

/* -- locks that survive the death of their holder -- */

#define WAITERS 0x80000000U

static bool dead(u32 tid)
{
	return tid && kill((pid_t)tid, 0) && errno == ESRCH;
}

void lock_word(u32 *word)
{
	const struct timespec slice = {.tv_nsec = 2000000};
	u32 mine = stub_tid(), seen;

	for (;;) {
		seen = 0;
		if (__atomic_compare_exchange_n(word, &seen, mine, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
			return;
		if (!(seen & WAITERS) &&
		    !__atomic_compare_exchange_n(word, &seen, seen | WAITERS, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			continue;
		seen |= WAITERS;
		syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
		if (dead(seen & ~WAITERS))
			__atomic_compare_exchange_n(word, &seen, 0, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
		mine |= WAITERS; /* others may sleep too: whoever slept wakes the next */
	}
}

void unlock_word(u32 *word)
{
	if (__atomic_exchange_n(word, 0, __ATOMIC_RELEASE) & WAITERS)
		syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* -- waiting for the device -- */

/* Sleep in the kernel as the driver does: in poll(), until the device says so; here a timer does. */
static void sleep_until(u64 end_ns)
{
	struct itimerspec at = {.it_value = {.tv_sec = (time_t)(end_ns / 1000000000ULL),
					     .tv_nsec = (long)(end_ns % 1000000000ULL)}};
	struct pollfd p;
	u64 ticks;

	if (timer_ < 0)
		timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	timerfd_settime(timer_, TFD_TIMER_ABSTIME, &at, NULL);
	p = (struct pollfd){.fd = timer_, .events = POLLIN};
	while (now_ns() < end_ns)
		if (poll(&p, 1, -1) > 0 && read(timer_, &ticks, sizeof(ticks)) < 0)
			break;
}

void wait_until(u64 end_ns, enum wait_mode mode)
{
	u64 begin = now_ns();

	if (begin >= end_ns)
		return;
	if (mode == WAIT_BLOCK)
		sleep_until(end_ns);
	else
		while (now_ns() < end_ns)
			if (mode == WAIT_YIELD)
				sched_yield();
			else
				cpu_relax();
	here.wait_ns += now_ns() - begin;
}
