/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * HTTP/1.1 framing of one direction of a connection, byte by byte, so that heads are copied out and bodies
 * are skipped without being looked at: content-length, chunked, until close (RFC 9112 sections 6 and 7).
 */
#pragma once

enum http_state {
	HTTP_FOREIGN, /* not HTTP, or its framing was lost: wait for a segment that begins with a method */
	HTTP_IDLE,    /* between messages */
	HTTP_HEAD,
	HTTP_BODY,	 /* `left` bytes of it to come */
	HTTP_CHUNK_SIZE, /* the line with the size of a chunk */
	HTTP_CHUNK_DATA, /* `left` bytes, then CRLF */
	HTTP_CHUNK_END,	 /* the CRLF after a chunk */
	HTTP_TRAILER,	 /* lines after the last chunk, to an empty one */
	HTTP_UNTIL_CLOSE,
};

/* What one byte did. */
enum http_step {
	STEP_NONE,
	STEP_HEAD_END,	  /* the byte was the last of a head; flags and length are set */
	STEP_MESSAGE_END, /* the byte was the last of a message */
	STEP_BROKEN,
};

#define HTTP_CHUNKED 1u
#define HTTP_HAS_LENGTH 2u
#define HTTP_MAX_HEAD 16384 /* what common servers allow at most */

struct http_side {
	__u64 left;   /* bytes of body or chunk to come */
	__u64 length; /* content-length, or the chunk size being read */
	__u32 head_bytes;
	__u16 column; /* in the current line, CR not counted */
	__u16 status; /* of a response */
	__u8 state;
	__u8 flags;
	__u8 match_length;  /* matched prefix of "content-length:" */
	__u8 match_coding;  /* matched prefix of "transfer-encoding:" */
	__u8 match_chunked; /* matched part of "chunked" within that line */
	__u8 line;
	__u8 _pad[2];
};

#define LENGTH_NAME "content-length:"
#define CODING_NAME "transfer-encoding:"
#define CHUNKED_NAME "chunked"

const char length_name[16] = LENGTH_NAME;
const char coding_name[32] = CODING_NAME;
const char chunked_name[8] = CHUNKED_NAME;

#define FOUR(a, b, c, d) ((__u32)(a) | (__u32)(b) << 8 | (__u32)(c) << 16 | (__u32)(d) << 24)

/* Whether these bytes, little-endian, are the start of a method, as far as the mask goes. */
static __always_inline bool http_is_method(__u32 word, __u32 mask)
{
	return !((word ^ FOUR('G', 'E', 'T', ' ')) & mask) || !((word ^ FOUR('P', 'U', 'T', ' ')) & mask) ||
	       !((word ^ FOUR('P', 'O', 'S', 'T')) & mask) || !((word ^ FOUR('H', 'E', 'A', 'D')) & mask) ||
	       !((word ^ FOUR('P', 'A', 'T', 'C')) & mask) || !((word ^ FOUR('D', 'E', 'L', 'E')) & mask) ||
	       !((word ^ FOUR('O', 'P', 'T', 'I')) & mask);
}

static __always_inline void http_begin(struct http_side *s)
{
	s->length = 0;
	s->left = 0;
	s->head_bytes = 0;
	s->column = 0;
	s->status = 0;
	s->flags = 0;
	s->match_length = s->match_coding = s->match_chunked = 0;
	s->line = 0;
	s->state = HTTP_HEAD;
}

static __always_inline enum http_step http_head_byte(struct http_side *s, __u8 c)
{
	__u8 lower = c >= 'A' && c <= 'Z' ? c + 32 : c;

	if (++s->head_bytes > HTTP_MAX_HEAD)
		return STEP_BROKEN;
	if (c == '\n') {
		if (!s->column && s->line)
			return STEP_HEAD_END;
		s->column = 0;
		s->line = 1;
		s->match_length = s->match_coding = s->match_chunked = 0;
		return STEP_NONE;
	}
	if (c == '\r')
		return STEP_NONE;
	if (!s->line) {
		if (s->column < 4) { /* `length` is free until there are headers */
			s->length |= (__u64)c << (8 * s->column);
			if (s->column == 3 && s->length != FOUR('H', 'T', 'T', 'P') &&
			    !http_is_method(s->length, ~0u))
				return STEP_BROKEN;
		}
		/* "HTTP/1.1 200": the status stands in columns 9 to 11 */
		if (s->column >= 9 && s->column <= 11 && c >= '0' && c <= '9')
			s->status = s->status * 10 + (c - '0');
	} else if (s->match_length == sizeof(LENGTH_NAME) - 1) {
		if (c >= '0' && c <= '9') {
			if (!(s->flags & HTTP_HAS_LENGTH))
				s->length = 0;
			s->flags |= HTTP_HAS_LENGTH;
			s->length = s->length * 10 + (c - '0');
			if (s->length >> 48)
				return STEP_BROKEN;
		}
	} else if (s->match_coding == sizeof(CODING_NAME) - 1) {
		if (lower == chunked_name[s->match_chunked & 7])
			s->match_chunked++;
		else
			s->match_chunked = lower == 'c';
		if (s->match_chunked == sizeof(CHUNKED_NAME) - 1) {
			s->flags |= HTTP_CHUNKED;
			s->match_chunked = 0;
		}
	} else {
		if (s->match_length == s->column && lower == length_name[s->match_length & 15])
			s->match_length++;
		if (s->match_coding == s->column && lower == coding_name[s->match_coding & 31])
			s->match_coding++;
	}
	if (s->column < 0xffff)
		s->column++;
	return STEP_NONE;
}

static __always_inline void http_chunk_begin(struct http_side *s)
{
	s->state = HTTP_CHUNK_SIZE;
	s->length = 0;
	s->column = 0;
	s->flags &= ~HTTP_HAS_LENGTH;
}

static __always_inline enum http_step http_chunk_size_byte(struct http_side *s, __u8 c)
{
	__u8 lower = c >= 'A' && c <= 'Z' ? c + 32 : c;
	__u8 digit = c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : 0xff;

	if (c == '\n') {
		if (!(s->flags & HTTP_HAS_LENGTH))
			return STEP_BROKEN;
		s->column = 0;
		s->left = s->length;
		s->state = s->length ? HTTP_CHUNK_DATA : HTTP_TRAILER;
		return STEP_NONE;
	}
	if (c == '\r')
		return STEP_NONE;
	if (s->column || c == ';' || c == ' ') { /* a chunk extension: ignored to the end of the line */
		if (!(s->flags & HTTP_HAS_LENGTH))
			return STEP_BROKEN;
		s->column = 1;
		return STEP_NONE;
	}
	if (digit == 0xff || s->length >> 44)
		return STEP_BROKEN;
	s->length = s->length * 16 + digit;
	s->flags |= HTTP_HAS_LENGTH;
	return STEP_NONE;
}

static __always_inline enum http_step http_byte(struct http_side *s, __u8 c)
{
	switch (s->state) {
	case HTTP_HEAD:
		return http_head_byte(s, c);
	case HTTP_CHUNK_SIZE:
		return http_chunk_size_byte(s, c);
	case HTTP_CHUNK_END:
		if (c == '\n')
			http_chunk_begin(s);
		else if (c != '\r')
			return STEP_BROKEN;
		return STEP_NONE;
	case HTTP_TRAILER:
		if (c == '\n') {
			if (!s->column)
				return STEP_MESSAGE_END;
			s->column = 0;
		} else if (c != '\r') {
			s->column = 1;
		}
		return STEP_NONE;
	default:
		return STEP_BROKEN;
	}
}
