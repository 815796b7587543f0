/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a descriptor of a task is on, read from its file table. */
#pragma once

/* The numbers are part of the record format (aux of fd_block). */
enum whyspan_file_kind {
	FILE_NONE,
	FILE_REGULAR,
	FILE_DIRECTORY,
	FILE_PIPE,
	FILE_SOCKET,
	FILE_EVENTFD,
	FILE_EPOLL,
	FILE_CHAR,
	FILE_OTHER,
};

#define S_IFMT 0xf000
#define S_IFIFO 0x1000
#define S_IFCHR 0x2000
#define S_IFDIR 0x4000
#define S_IFREG 0x8000
#define S_IFSOCK 0xc000

struct whyspan_file {
	__u64 inode;
	__u64 key;
	__u32 kind;
	__u32 dev;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
};

static __always_inline struct file *whyspan_file_of(struct task_struct *task, __u32 fd)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files, *file = NULL;

	if (!table || fd >= BPF_CORE_READ(table, max_fds))
		return NULL;
	files = BPF_CORE_READ(table, fd);
	bpf_probe_read_kernel(&file, sizeof(file), &files[fd]);
	return file;
}

/* Anonymous inodes have no type: the name of the dentry tells ("[eventfd]", "[eventpoll]"). */
static __always_inline __u32 whyspan_anon_kind(struct file *file)
{
	const unsigned char *name = BPF_CORE_READ(file, f_path.dentry, d_name.name);
	char text[8] = {};

	bpf_probe_read_kernel(text, sizeof(text), name);
	if (text[0] != '[' || text[1] != 'e' || text[2] != 'v' || text[5] != 't')
		return FILE_OTHER;
	return text[6] == 'f' ? FILE_EVENTFD : text[6] == 'p' ? FILE_EPOLL : FILE_OTHER;
}

/* The socket of a file that is one. */
static __always_inline struct sock *whyspan_sock_of(struct file *file)
{
	struct socket *socket = BPF_CORE_READ(file, private_data);

	return BPF_CORE_READ(socket, sk);
}

/* A socket's cookie is made when somebody first asks for it; before, its address stands in. */
static __always_inline __u64 whyspan_cookie(const struct sock *sk)
{
	__u64 cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);

	return cookie ? cookie : whyspan_key(sk);
}

static __always_inline void whyspan_describe_file(struct file *file, struct whyspan_file *out)
{
	__u16 mode = BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT;
	struct sock *sk;

	out->inode = BPF_CORE_READ(file, f_inode, i_ino);
	out->dev = BPF_CORE_READ(file, f_inode, i_sb, s_dev);
	out->key = 0;
	out->lport = out->rport = 0;
	out->_pad = 0;
	switch (mode) {
	case S_IFREG:
		out->kind = FILE_REGULAR;
		break;
	case S_IFDIR:
		out->kind = FILE_DIRECTORY;
		break;
	case S_IFCHR:
		out->kind = FILE_CHAR;
		break;
	case S_IFIFO:
		out->kind = FILE_PIPE;
		out->key = whyspan_key(BPF_CORE_READ(file, f_inode, i_pipe));
		break;
	case S_IFSOCK:
		out->kind = FILE_SOCKET;
		sk = whyspan_sock_of(file);
		out->key = BPF_CORE_READ(sk, __sk_common.skc_family) == 1 ? out->inode : whyspan_cookie(sk);
		out->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
		out->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
		break;
	default:
		out->kind = mode ? FILE_OTHER : whyspan_anon_kind(file);
		if (out->kind == FILE_EVENTFD)
			out->key = whyspan_key(BPF_CORE_READ(file, private_data));
	}
}
