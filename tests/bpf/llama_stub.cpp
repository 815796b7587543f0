/*
 * A stand-in for libllama.so that throws, and a program that catches: what a return probe would end. Built
 * twice, as the library (-DLIBRARY) and as the program.
 */
#include <cstdio>
#include <stdexcept>
#include <unistd.h>

extern "C" int llama_encode(void *context, int n);

#ifdef LIBRARY
extern "C" __attribute__((visibility("default"), noinline)) int llama_encode(void *, int n)
{
	if (n % 2)
		throw std::runtime_error("thrown");
	return n;
}
extern "C" __attribute__((visibility("default"))) float *llama_get_logits(void *)
{
	return nullptr;
}
extern "C" __attribute__((visibility("default"))) void llama_memory_clear(void *, bool)
{
}
#else
int main()
{
	int caught = 0;

	printf("%d\n", getpid());
	fflush(stdout);
	getchar();
	for (int i = 0; i < 7; i++) {
		try {
			llama_encode(nullptr, i);
		} catch (const std::exception &) {
			caught++;
		}
	}
	printf("%d\n", caught);
	return 0;
}
#endif
