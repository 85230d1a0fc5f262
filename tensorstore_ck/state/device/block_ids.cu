// BLAKE3 of many blocks of device memory. NVRTC compiles it for a GPU; `g++ -DHOST` compiles it for the CPU, for tests.
//
// A thread hashes a chunk of 1 KiB, and a CTA merges up to 128 of them; then a CTA merges the groups of each block. Merging neighbours level by
// level, and passing an odd last node on, makes BLAKE3's tree, whose left subtrees are the largest that are complete.

#ifdef HOST
#include <cstdint>
#include <cstring>
typedef uint32_t u32;
typedef uint64_t u64;
#define DEVICE static inline
#define SHARED static
#define KERNEL(name, ...) extern "C" void name(u32 cta, __VA_ARGS__)
#define CTA cta
#define FOR_EACH(i, count) for (u32 i = 0; i < (count); i++)  // the threads, one after another
#define BARRIER
#define UNROLL
#else
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(128) name(__VA_ARGS__)
#define CTA blockIdx.x
#define FOR_EACH(i, count) for (u32 i = threadIdx.x; i < (count); i += blockDim.x)
#define BARRIER __syncthreads()
#define UNROLL _Pragma("unroll")
#endif

typedef unsigned char u8;

#define CHUNK_BYTES 1024u
#define GROUP_CHUNKS 128u
#define GROUP_BYTES (CHUNK_BYTES * GROUP_CHUNKS)
#define STEP_BYTES 64u

enum Flag { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

DEVICE u32 rotated(u32 x, int bits) {
#ifdef HOST
  return (x >> bits) | (x << (32 - bits));
#else
  return __funnelshift_r(x, x, bits);
#endif
}

DEVICE void set_initial(u32* out) {
  out[0] = 0x6A09E667u, out[1] = 0xBB67AE85u, out[2] = 0x3C6EF372u, out[3] = 0xA54FF53Au;
  out[4] = 0x510E527Fu, out[5] = 0x9B05688Cu, out[6] = 0x1F83D9ABu, out[7] = 0x5BE0CD19u;
}

DEVICE void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
  a += b + x, d = rotated(d ^ a, 16), c += d, b = rotated(b ^ c, 12);
  a += b + y, d = rotated(d ^ a, 8), c += d, b = rotated(b ^ c, 7);
}

// Replaces the chaining value by the compression of it and 64 bytes; `m` is changed.
DEVICE void compress(u32* value, u32* m, u32 counter, u32 size_bytes, u32 flags) {
  u32 v[16];
  UNROLL for (int i = 0; i < 8; i++) v[i] = value[i];
  set_initial(v + 8);
  v[12] = counter, v[13] = 0, v[14] = size_bytes, v[15] = flags;
  UNROLL for (int round = 0; round < 7; round++) {
    UNROLL for (int i = 0; i < 4; i++) mix(v[i], v[i + 4], v[i + 8], v[i + 12], m[2 * i], m[2 * i + 1]);
    UNROLL for (int i = 0; i < 4; i++) mix(v[i], v[4 + (i + 1) % 4], v[8 + (i + 2) % 4], v[12 + (i + 3) % 4], m[8 + 2 * i], m[9 + 2 * i]);
    const u32 next[16] = {m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8]};
    UNROLL for (int i = 0; i < 16; i++) m[i] = next[i];
  }
  UNROLL for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];
}

// Loads up to 64 bytes, zeros behind them. Blocks of views may begin at any byte.
DEVICE void load(u32* m, const u8* data, u32 size_bytes) {
#ifndef HOST
  if (size_bytes == STEP_BYTES && (u64)data % 16 == 0) {
    UNROLL for (int i = 0; i < 4; i++) {
      const uint4 four = ((const uint4*)data)[i];
      m[4 * i] = four.x, m[4 * i + 1] = four.y, m[4 * i + 2] = four.z, m[4 * i + 3] = four.w;
    }
    return;
  }
#endif
  UNROLL for (int i = 0; i < 16; i++) {
    m[i] = 0;
    UNROLL for (int j = 0; j < 4; j++) {
      if (4u * i + j < size_bytes) m[i] |= (u32)data[4 * i + j] << (8 * j);
    }
  }
}

DEVICE void hash_chunk(const u8* data, u32 size_bytes, u32 counter, u32 root, u32* out) {
  u32 value[8];
  set_initial(value);
  const u32 steps = (size_bytes + STEP_BYTES - 1) / STEP_BYTES;
  for (u32 step = 0; step < steps; step++) {
    const u32 left = size_bytes - step * STEP_BYTES, taken = left < STEP_BYTES ? left : STEP_BYTES;
    u32 m[16];
    load(m, data + step * STEP_BYTES, taken);
    compress(value, m, counter, taken, (step == 0 ? CHUNK_START : 0) | (step + 1 == steps ? CHUNK_END | root : 0));
  }
  UNROLL for (int i = 0; i < 8; i++) out[i] = value[i];
}

// One node of the next level: of nodes 2 * i and 2 * i + 1, or of an odd last one alone.
DEVICE void merge(const u32* left, const u32* right, bool is_alone, u32 root, u32* out) {
  if (is_alone) {
    UNROLL for (int i = 0; i < 8; i++) out[i] = left[i];
    return;
  }
  u32 m[16], value[8];
  UNROLL for (int i = 0; i < 8; i++) m[i] = left[i], m[8 + i] = right[i];
  set_initial(value);
  compress(value, m, 0, STEP_BYTES, PARENT | root);
  UNROLL for (int i = 0; i < 8; i++) out[i] = value[i];
}

// A CTA for each group of chunks: `nodes[group]` is the top of its tree, and the id of a block that has no other group.
KERNEL(hash_groups, const u64* addresses, const u64* sizes, const u32* first_group, const u32* block_of_group, u32* nodes) {
  SHARED u32 levels[2][GROUP_CHUNKS][9];  // 9: neighbouring threads use different banks
  const u32 group = CTA, block = block_of_group[group];
  const u64 first_chunk = (u64)(group - first_group[block]) * GROUP_CHUNKS, start = first_chunk * CHUNK_BYTES, left = sizes[block] - start;
  const u8* data = (const u8*)addresses[block] + start;
  const bool is_whole = sizes[block] <= GROUP_BYTES;
  u32 count = left < GROUP_BYTES ? (u32)((left + CHUNK_BYTES - 1) / CHUNK_BYTES) : GROUP_CHUNKS, level = 0;
  FOR_EACH(i, count) {
    const u64 rest = left - (u64)i * CHUNK_BYTES;
    const u32 root = is_whole && count == 1 ? ROOT : 0;
    hash_chunk(data + (u64)i * CHUNK_BYTES, rest < CHUNK_BYTES ? (u32)rest : CHUNK_BYTES, (u32)first_chunk + i, root, levels[0][i]);
  }
  BARRIER;
  while (count > 1) {
    const u32 root = is_whole && count == 2 ? ROOT : 0;
    FOR_EACH(i, (count + 1) / 2) merge(levels[level][2 * i], levels[level][2 * i + 1], 2 * i + 1 == count, root, levels[1 - level][i]);
    BARRIER;
    level = 1 - level, count = (count + 1) / 2;
  }
  FOR_EACH(i, 8u) nodes[(u64)group * 8 + i] = levels[level][0][i];
}

// A CTA for each block: the id from the nodes of its groups. `spare` is as large as `nodes`; both are changed.
KERNEL(merge_groups, const u32* first_group, u32* nodes, u32* spare, u32* ids) {
  const u32 block = CTA;
  u32 count = first_group[block + 1] - first_group[block];
  u32 *from = nodes + (u64)first_group[block] * 8, *to = spare + (u64)first_group[block] * 8;
  while (count > 1) {
    const u32 root = count == 2 ? ROOT : 0;
    FOR_EACH(i, (count + 1) / 2) merge(from + 16 * i, from + 16 * i + 8, 2 * i + 1 == count, root, to + 8 * i);
    BARRIER;
    u32* const filled = to;
    to = from, from = filled, count = (count + 1) / 2;
  }
  FOR_EACH(i, 8u) ids[(u64)block * 8 + i] = from[i];
}
