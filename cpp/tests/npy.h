// Reads a .npy file (version 1, C order, little-endian) of the golden data.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace cake::testing {

// testdata/golden of the source tree, or CAKE_GOLDEN_DIR where the tests run elsewhere.
inline std::string golden_folder() {
  const char* folder = std::getenv("CAKE_GOLDEN_DIR");
  return folder != nullptr ? folder : CAKE_GOLDEN_DIR;
}

// The elements of <set>/<key>.npy; T must have the file's element size.
template <class T>
std::vector<T> golden(const std::string& set, const std::string& key) {
  const std::string path = golden_folder() + "/" + set + "/" + key + ".npy";
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() < 10 || std::memcmp(bytes.data(), "\x93NUMPY\x01", 7) != 0) {
    throw std::runtime_error("no .npy file of version 1: " + path);
  }
  const size_t header = 10 + static_cast<uint8_t>(bytes[8]) + 256 * static_cast<uint8_t>(bytes[9]);
  const std::string text(bytes.data() + 10, header - 10);
  const std::string size = std::to_string(sizeof(T)) + "'";
  const size_t descr = text.find("'descr': '");
  if (descr == std::string::npos || text.substr(descr + 12, size.size()) != size ||
      text.find("'fortran_order': False") == std::string::npos) {
    throw std::runtime_error("unexpected element type or order in " + path + ": " + text);
  }
  std::vector<T> values((bytes.size() - header) / sizeof(T));
  std::memcpy(values.data(), bytes.data() + header, values.size() * sizeof(T));
  return values;
}

}  // namespace cake::testing
