// Building error messages: "argument: expected ..., got ...".
#pragma once

#include <sstream>
#include <string>

#include "cake/status.h"

namespace cake {

template <class... Parts>
Status error(StatusCode code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return {code, std::move(text).str()};
}

template <class... Parts>
Status invalid_argument(const Parts&... parts) {
  return error(StatusCode::kInvalidArgument, parts...);
}

}  // namespace cake
