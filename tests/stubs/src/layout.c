/* Print the layout of the simulated device's file as JSON: {struct: {"size": n, "fields": [[name, type, count, offset]]}}. */
#include <stddef.h>
#include <stdio.h>

#include "region.h"

#define SCALAR(type, name) {#name, #type, 0, offsetof(struct HERE, name)},
#define ARRAY(type, name, count) {#name, #type, count, offsetof(struct HERE, name)},

struct field {
	const char *name, *type;
	size_t count, offset;
};

static void print(const char *name, size_t size, const struct field *fields, size_t count, const char *comma)
{
	printf("%s\"%s\": {\"size\": %zu, \"fields\": [", comma, name, size);
	for (size_t i = 0; i < count; i++)
		printf("%s[\"%s\", \"%s\", %zu, %zu]", i ? ", " : "", fields[i].name, fields[i].type, fields[i].count,
		       fields[i].offset);
	printf("]}");
}

#define PRINT(s, comma) print(#s, sizeof(struct s), s##_fields, sizeof(s##_fields) / sizeof(*s##_fields), comma)

#define HERE rule
static const struct field rule_fields[] = {RULE_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE fail
static const struct field fail_fields[] = {FAIL_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE control
static const struct field control_fields[] = {CONTROL_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE gpu
static const struct field gpu_fields[] = {GPU_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE proc
static const struct field proc_fields[] = {PROC_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE func
static const struct field func_fields[] = {FUNC_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE call
static const struct field call_fields[] = {CALL_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE xid
static const struct field xid_fields[] = {XID_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE meeting
static const struct field meeting_fields[] = {MEETING_FIELDS(SCALAR, ARRAY)};
#undef HERE
#define HERE region
static const struct field region_fields[] = {REGION_FIELDS(SCALAR, ARRAY)};
#undef HERE

int main(void)
{
	printf("{");
	PRINT(rule, "");
	PRINT(fail, ", ");
	PRINT(control, ", ");
	PRINT(gpu, ", ");
	PRINT(proc, ", ");
	PRINT(func, ", ");
	PRINT(call, ", ");
	PRINT(xid, ", ");
	PRINT(meeting, ", ");
	PRINT(region, ", ");
	printf("}\n");
	return 0;
}
