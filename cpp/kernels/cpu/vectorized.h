// Functions compiled for several vector widths; the widest of the running machine is taken.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CAKE_CPU_VECTORIZED \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CAKE_CPU_VECTORIZED
#endif
