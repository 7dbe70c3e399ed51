// Whole blocks: copied, gathered, scattered, zeroed, summed. Words of 16 bytes; nothing here looks at a value.
//
// Written so that a C compiler takes it as well (emulation.py), hence no templates and no intrinsics but atomicAdd.

#ifdef __cplusplus
#define KERNEL extern "C" __global__ void
#else
#define KERNEL void
#endif

typedef long long i64;
typedef unsigned long long u64;

// Columns of the address table, one row per segment; everything in bytes but the block ids.
enum { FIRST_BLOCK, END_BLOCK, BASE, STRIDES = 4, COLUMNS = 10 };
enum { GATHER, SCATTER, ZERO };

// Head 0, slot 0 of a block's keys (role 0) or values (role 1). Offsets are 64 bits wide throughout.
static
#ifdef __cplusplus
__device__
#endif
char* block_address(const i64* segments, i64 block, int role) {
  while (block >= segments[END_BLOCK]) segments += COLUMNS;
  return (char*)segments[BASE + role] + (block - segments[FIRST_BLOCK]) * segments[STRIDES + 3 * role];
}

// Byte of a block, from its first one, that holds word `w` of the canonical order [slots, heads, row].
static
#ifdef __cplusplus
__device__
#endif
i64 place_of(const i64* segments, int role, i64 w, int heads, int row_words) {
  const i64 row = w / row_words;
  const i64* strides = segments + STRIDES + 3 * role;
  return row / heads * strides[2] + row % heads * strides[1] + w % row_words * 16;
}

// Grid (blocks, 2 roles). Buffers are [blocks, slots, heads, row].
KERNEL move_blocks(const i64* segments, const i64* blocks, int slots, int heads, int row_words, int operation,
                   char* key, char* value) {
  const int role = blockIdx.y;
  const i64 words = (i64)slots * heads * row_words;
  char* in_block = block_address(segments, blocks[blockIdx.x], role);
  uint4* in_buffer = (uint4*)(role ? value : key) + blockIdx.x * words;
  const uint4 zero = {0, 0, 0, 0};
  for (i64 w = threadIdx.x; w < words; w += blockDim.x) {
    uint4* word = (uint4*)(in_block + place_of(segments, role, w, heads, row_words));
    if (operation == GATHER) in_buffer[w] = *word;
    else *word = operation == SCATTER ? in_buffer[w] : zero;
  }
}

// Grid (blocks, 2 roles). No destination is a source of another block: the caller has looked.
KERNEL copy_blocks(const i64* segments, const i64* sources, const i64* destinations, int slots, int heads,
                   int row_words) {
  const int role = blockIdx.y;
  const i64 words = (i64)slots * heads * row_words;
  const char* from = block_address(segments, sources[blockIdx.x], role);
  char* to = block_address(segments, destinations[blockIdx.x], role);
  for (i64 w = threadIdx.x; w < words; w += blockDim.x) {
    const i64 at = place_of(segments, role, w, heads, row_words);
    *(uint4*)(to + at) = *(const uint4*)(from + at);
  }
}

// Grid (blocks, 2 roles); `sums` is zero before. The sum of splitmix64(word + place * golden ratio) over 64-bit words in
// canonical order, keys before values; it commutes, so threads add in any order (cpu/blocks.py has the same).
KERNEL checksum_blocks(const i64* segments, const i64* blocks, int slots, int heads, int row_words, u64* sums) {
  const int role = blockIdx.y;
  const i64 words = (i64)slots * heads * row_words;
  const char* in_block = block_address(segments, blocks[blockIdx.x], role);
  u64 total = 0;
  for (i64 w = threadIdx.x; w < words; w += blockDim.x) {
    const u64* pair = (const u64*)(in_block + place_of(segments, role, w, heads, row_words));
    for (int half = 0; half < 2; ++half) {
      const u64 place = (u64)(2 * (role * words + w) + half + 1);
      u64 x = pair[half] + place * 0x9E3779B97F4A7C15ull;
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
      total += x ^ (x >> 31);
    }
  }
  atomicAdd(sums + blockIdx.x, total);
}
